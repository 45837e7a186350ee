"""Image encoders: CPU milliseconds an image, size of the file, and what threads gain.

    python benchmarks/bench_encode.py --out benchmarks/results/cpu_encode.json

Rivals of Pillow are measured where they are installed (opencv-python-headless, imagecodecs, simplejpeg,
fpng), photographs where scikit-image or --photos has some. Times are CPU time of one thread, the best of
--repeats, and the mean over the images of a kind. Lossless files are decoded by Pillow and compared. What
threads gain (--threads) needs cores that nobody else uses.

What is needed, from a GPU that draws Qwen-Image in 20 steps with guidance in fp8: about 8 images/s at 256²
and 1.5 at 512². ``cores`` is what an encoder takes of the machine at the rate of its side; rows named
``offdiff`` hold everything that is done to an image, the checksum and a JPEG's decoding included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL.features
import PIL.Image

from offline_diffusion.data.encode import Pixels, decode_image, encode_image, pixels_sha256

Encoder = Callable[[Pixels], bytes]

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
"""Colour photographs that scikit-image ships."""

NEEDED_PIXELS_PER_S = 8 * 256**2
"""Most pixels a GPU makes in a second; larger images come more slowly still."""

PACKAGES = ("numpy", "pillow", "opencv-python-headless", "imagecodecs", "simplejpeg", "fpng")


# --- what is encoded ---------------------------------------------------------------------------


def contents(side: int, photos: Path | None) -> dict[str, list[Pixels]]:
    """Images of ``side`` × ``side`` pixels by kind."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side] / side
    waves = np.stack([np.sin(9 * rows + 4 * columns), np.cos(7 * columns - rows), rows * columns], -1)
    smooth = 128 + 100 * waves
    grain = rng.normal(0, 3, smooth.shape)
    kinds = {
        "waves": [smooth.clip(0, 255).astype(np.uint8)],
        "waves+grain": [(smooth + grain).clip(0, 255).astype(np.uint8)],
        "noise": [rng.integers(0, 256, smooth.shape, dtype=np.uint8)],
    }
    found = [_square(path, side) for path in _photo_paths(photos)]
    return {"photographs": found, **kinds} if found else kinds


def _photo_paths(folder: Path | None) -> list[Path]:
    if folder is not None:
        return sorted(path for path in folder.iterdir() if path.suffix in (".png", ".jpg", ".jpeg"))
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        return []
    data = Path(spec.origin).parent / "data"
    return [data / name for name in PHOTOS if (data / name).exists()]


def _square(path: Path, side: int) -> Pixels:
    with PIL.Image.open(path) as image:
        short = min(image.size)
        left, top = (image.width - short) // 2, (image.height - short) // 2
        box = (left, top, left + short, top + short)
        return np.asarray(image.convert("RGB").resize((side, side), PIL.Image.Resampling.LANCZOS, box))


# --- encoders ----------------------------------------------------------------------------------


def pillow(**options: Any) -> Encoder:
    def encode(pixels: Pixels) -> bytes:
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, **options)
        return file.getvalue()

    return encode


def offdiff(image_format: Any, level: int | None = None) -> Encoder:
    return lambda pixels: encode_image(pixels, image_format, level)[0]


def encoders() -> Iterator[tuple[str, Encoder]]:
    """Name and encoder, ours first; the format is the name's second word."""
    for image_format in ("png", "jpeg", "webp"):
        yield f"offdiff {image_format}", offdiff(image_format)
    for level in (6, 9):
        yield f"offdiff png {level}", offdiff("png", level)
    for level in (0, 2, 3, 5):
        yield f"offdiff webp {level}", offdiff("webp", level)
    for level in (0, 1, 3):
        yield f"pillow png zlib {level}", pillow(format="PNG", compress_level=level)
    yield "pillow png huffman", pillow(format="PNG", compress_level=1, compress_type=PIL.Image.HUFFMAN_ONLY)
    yield "pillow png runs", pillow(format="PNG", compress_level=1, compress_type=PIL.Image.RLE)
    for quality in (80, 95):
        yield f"pillow jpeg {quality}", pillow(format="JPEG", quality=quality, subsampling="4:4:4")
    yield from _rivals()


def _rivals() -> Iterator[tuple[str, Encoder]]:
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)

        def opencv(suffix: str, *options: int) -> Encoder:
            return lambda pixels: cv2.imencode(suffix, pixels[..., ::-1], options)[1].tobytes()

        runs = (cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_RLE)
        all_filters = (cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_ALL_FILTERS)
        yield "opencv png runs", opencv(".png", *runs, *all_filters)
        unsampled = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444)
        yield "opencv jpeg 95", opencv(".jpg", cv2.IMWRITE_JPEG_QUALITY, 95, *unsampled)
    if importlib.util.find_spec("imagecodecs"):
        import imagecodecs

        yield "imagecodecs png libpng 1", lambda pixels: imagecodecs.png_encode(pixels, level=1)
        yield "imagecodecs png libspng 1", lambda pixels: imagecodecs.spng_encode(pixels, level=1)
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        yield "simplejpeg jpeg 95", lambda pixels: simplejpeg.encode_jpeg(pixels, 95, "RGB", "444")
    if importlib.util.find_spec("fpng"):
        from fpng import fpng_ext

        yield (
            "fpng png",
            lambda pixels: fpng_ext.encode_image_to_memory(
                pixels.tobytes(), pixels.shape[1], pixels.shape[0], 3
            ),
        )


# --- measuring ---------------------------------------------------------------------------------


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """Least CPU milliseconds of this process over some calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best * 1000


def threads_gain(encode: Encoder, pixels: Pixels, num_threads: int, repeats: int) -> float:
    """Images a second of ``num_threads`` over those of one; close to ``num_threads`` without a lock."""

    def seconds(workers: int) -> float:
        with ThreadPoolExecutor(workers) as pool:
            start = time.perf_counter()
            list(pool.map(encode, [pixels] * (4 * num_threads)))
            return time.perf_counter() - start

    return min(seconds(1) for _ in range(repeats)) / min(seconds(num_threads) for _ in range(repeats))


def measure(
    name: str, encode: Encoder, side: int, kinds: dict[str, list[Pixels]], repeats: int, num_threads: int
) -> list[dict[str, Any]]:
    """A record for each kind of content."""
    records = []
    for kind, images in kinds.items():
        files = [encode(pixels) for pixels in images]
        if " jpeg" not in name:
            for pixels, file in zip(images, files, strict=True):
                assert np.array_equal(decode_image(file), pixels), f"{name} lost something"
        ms = float(np.mean([cpu_ms(lambda p=pixels: encode(p), repeats) for pixels in images]))
        records.append(
            {
                "encoder": name,
                "side": side,
                "content": kind,
                "num_images": len(images),
                "cpu_ms": round(ms, 2),
                "bytes_per_pixel": round(float(np.mean([len(file) for file in files])) / side**2, 4),
                "cores": round(ms / 1000 * NEEDED_PIXELS_PER_S / side**2, 4),
            }
        )
    if num_threads > 1:
        pixels = next(iter(kinds.values()))[0]
        records[0]["threads_gain"] = round(threads_gain(encode, pixels, num_threads, repeats), 2)
    return records


def measure_checks(side: int, pixels: Pixels, repeats: int) -> list[dict[str, Any]]:
    """What is done beside encoding: the checksum, and the decoding that a JPEG's needs."""
    jpeg = pillow(format="JPEG", quality=95, subsampling="4:4:4")(pixels)
    works = {"sha256": lambda: pixels_sha256(pixels), "decode jpeg": lambda: decode_image(jpeg)}
    return [
        {"encoder": name, "side": side, "cpu_ms": round(cpu_ms(work, repeats), 3)}
        for name, work in works.items()
    ]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="measure what so many gain over one")
    parser.add_argument("--photos", type=Path, help="a folder of photographs")
    parser.add_argument("--only", nargs="*", help="words of the encoders' names")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(args)
    header = {
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": _versions(),
        "threads": options.threads,
        "needed_pixels_per_s": NEEDED_PIXELS_PER_S,
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }
    print(json.dumps(header, indent=1))
    records: list[dict[str, Any]] = []
    for side in options.sides:
        kinds = contents(side, options.photos)
        titles = "".join(f"{kind:>18}" for kind in kinds)
        print(f"\n{side}²: CPU ms, bytes a pixel {titles}")
        for name, encode in encoders():
            if not options.only or any(word in name for word in options.only):
                found = measure(name, encode, side, kinds, options.repeats, options.threads)
                records += found
                print(_line(name, found), flush=True)
        checks = measure_checks(side, next(iter(kinds.values()))[0], options.repeats)
        print("\n".join(f"{check['encoder']:<28}{check['cpu_ms']:13.2f}" for check in checks))
        records += checks
    result = {**header, "records": records}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _line(name: str, found: Sequence[dict[str, Any]]) -> str:
    cells = "".join(f"{record['cpu_ms']:10.1f} {record['bytes_per_pixel']:6.3f} " for record in found)
    gain = found[0].get("threads_gain")
    return f"{name:<28}{cells}" + ("" if gain is None else f"   x{gain:.2f}")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["zlib-ng of pillow"] = str(PIL.features.version("zlib_ng"))
    return versions


if __name__ == "__main__":
    main()
