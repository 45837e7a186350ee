"""Outputs on the Hub: against a server on this machine whose requests fail on demand."""

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hub_server import REPO, Fault, HubRequest, HubServer
from output_fakes import contents, make_identity, make_rows, run_job

from offline_diffusion.data import hub_storage, requests_again
from offline_diffusion.data.card import write_card
from offline_diffusion.data.claims import Claims
from offline_diffusion.data.ledger import Ledger, open_to_read
from offline_diffusion.data.quick_check import find_broken
from offline_diffusion.data.remotes import open_storage
from offline_diffusion.data.shard_queue import ShardQueue
from offline_diffusion.data.status import read_status
from offline_diffusion.data.storage import Storage
from offline_diffusion.data.verify import verify, verify_shards
from offline_diffusion.errors import ConfigError, JobError, JobInterrupted, JobMismatchError

URL = f"hf://datasets/{REPO}"
ROWS = make_rows(6, images=2, faults=(4,))
MARKERS = ["_state/shards/shard-00000.json", "_state/shards/shard-00001.json"]
# The Hub's library calls its HTTP client in an old way when it uploads large files without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

SHARD_0 = ("_state/shards/shard-00000.json", "images/shard-00000.parquet", "metrics/shard-00000.parquet")


def open_job(work: Path, url: str = URL, *, rows: int = 6, **options: Any) -> Ledger:
    ledger = Ledger(work, open_storage(url, **({"give_up_after_s": 5.0} | options)))
    ledger.open(make_identity(rows, 3))
    return ledger


def check(copy: Path, whole: Path) -> None:
    """A copy of what is there is a whole dataset, the same as that of a run on a disk."""
    report = verify(copy, num_threads=1)
    assert report.ok, report.problems
    assert report.finished
    assert contents(copy) == contents(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    ledger = Ledger(out)
    ledger.open(make_identity(6, 3))
    run_job(ledger, ROWS)
    return out


def test_a_shard_is_one_commit_with_its_marker(
    hub: HubServer, tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    assert capfd.readouterr().err == "", "the library's progress bars"
    check(hub.download(tmp_path / "copy"), whole)
    shards = sorted((each for each in hub.commits if "shard" in each.message), key=lambda each: each.message)
    assert [commit.message for commit in shards] == ["shard 0: 3 rows", "shard 1: 3 rows"]
    assert shards[0].added == SHARD_0
    assert "failures/shard-00001.parquet" in shards[1].added
    others = {path for path in hub.files() if path.startswith("_state/")}
    assert others == set(MARKERS), "claims and signs of life are no commits"
    assert len(hub.commits) <= len(shards) + 3, "job.json and the card, twice"
    left = [path for path in (tmp_path / "work").rglob("*") if path.suffix in {".parquet", ".arrows"}]
    assert not left, "the working folder keeps no images"


@pytest.mark.parametrize(
    ("url", "prefix", "branch"),
    [
        (f"{URL}/runs/first", "runs/first/", "main"),
        (f"{URL}@dev", "", "dev"),
        (f"{URL}@refs/pr/1/deep", "deep/", "refs/pr/1"),
        (f"{URL}@refs%2Fpr%2F1", "", "refs/pr/1"),
    ],
)
def test_a_branch_and_a_folder_are_part_of_the_url(
    hub: HubServer, tmp_path: Path, whole: Path, url: str, prefix: str, branch: str
) -> None:
    hub.make_branch(branch) if branch != "main" else hub.push({"thesis.pdf": b"dear"})
    run_job(open_job(tmp_path / "work", url), ROWS)
    check(hub.download(tmp_path / "copy", prefix, branch), whole)
    assert all(path.startswith(prefix) or path == "thesis.pdf" for path in hub.files(branch))
    assert set(hub.files("main")) <= {"thesis.pdf", *(hub.files(branch) if branch == "main" else ())}
    with open_to_read(url) as ledger:
        assert not [report for report in verify_shards(ledger, num_threads=1) if report.problems]


def test_nothing_is_done_twice(hub: HubServer, tmp_path: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    before = len(hub.commits)
    for work in (tmp_path / "work", tmp_path / "another machine"):
        drawn: list[tuple[int, int]] = []
        ledger = open_job(work)
        run_job(ledger, ROWS, drawn=drawn)
        assert not drawn
        write_card(ledger)
        write_card(ledger)
    assert [commit.message for commit in hub.commits[before:]] in ([], ["new README.md"])


def test_a_commit_by_somebody_else_in_between_is_no_harm(hub: HubServer, tmp_path: Path, whole: Path) -> None:
    """Whenever we commit, the head has just moved: twice each time."""
    pushes = itertools.count()
    moved: dict[str, int] = {}

    def move(request: HubRequest) -> None:
        key = f"{len(hub.commits) - sum(moved.values())}"
        if request.kind == "commit" and moved.setdefault(key, 0) < 2:
            moved[key] += 1
            hub.push({f"notes/{next(pushes)}.txt": b"mine"})

    hub.fault = move
    said: list[str] = []
    run_job(open_job(tmp_path / "work", say=said.append), ROWS)
    hub.fault = lambda _: None
    assert sum(moved.values()) >= 6
    assert len([path for path in hub.files() if path.startswith("notes/")]) == sum(moved.values())
    assert not said, "nothing to worry about"
    copy = hub.download(tmp_path / "copy")
    check(copy, whole)


def test_a_repo_that_others_commit_to_without_end_ends_the_job_in_good_order(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_storage, "MAX_MOVES", 3)
    hub.fault = lambda request: 412 if request.kind == "commit" else None
    with pytest.raises(JobInterrupted, match=r"job\.json: others commit to the repo all the time"):
        open_job(tmp_path / "work")
    assert [request.kind for request in hub.requests].count("commit") == 3


def test_who_comes_second_has_lost_and_leaves_no_trace(hub: HubServer, tmp_path: Path, whole: Path) -> None:
    """Another machine publishes the shard between our look at the head and our commit."""
    other = open_job(tmp_path / "other")
    rival = threading.Lock()

    def overtake(request: HubRequest) -> None:
        if request.kind == "commit" and len(hub.commits) == 1 and rival.acquire(blocking=False):
            hub.fault = lambda _: None
            run_job(other, ROWS)

    ledger = open_job(tmp_path / "work")
    hub.fault = overtake
    said: list[str] = []
    run_job(ledger, ROWS, say=said.append)
    lost = "was published or taken over by another process: left to it"
    assert sorted(said) == [f"shard {shard} {lost}" for shard in range(2)]
    check(hub.download(tmp_path / "copy"), whole)
    shards = [commit.message for commit in hub.commits if commit.message.startswith("shard")]
    assert sorted(shards) == ["shard 0: 3 rows", "shard 1: 3 rows"]
    assert not list((tmp_path / "work" / "_state" / "staged").iterdir())


def test_of_many_that_publish_at_once_one_wins(hub: HubServer, tmp_path: Path, whole: Path) -> None:
    """All make every shard without a claim, as machines do that do not know of each other."""
    threads = [
        threading.Thread(target=lambda n=n: run_job(open_job(tmp_path / f"{n}"), ROWS)) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(hub.download(tmp_path / "copy"), whole)
    files = hub.files()
    assert sorted(path for path in files if path.startswith("_state/")) == MARKERS
    writers = [commit for commit in hub.commits if "images/shard-00000.parquet" in commit.added]
    assert [commit.added for commit in writers] == [SHARD_0]


@pytest.mark.parametrize("fault", [503, 429, "lost"])
def test_requests_that_fail_are_made_again(hub: HubServer, tmp_path: Path, whole: Path, fault: Fault) -> None:
    """The first few tries fail, each with a page in the place of JSON; where only the answer is lost, what
    was done must not be taken for another's deed."""
    tries: dict[tuple[HubRequest, int], int] = {}

    def first_tries(request: HubRequest) -> Fault | None:
        key = request, len(hub.commits) if request.kind == "commit" else 0
        tries[key] = tries.get(key, 0) + 1
        return fault if tries[key] <= (1 if fault == "lost" else 2) else None

    hub.fault = first_tries
    said: list[str] = []
    run_job(open_job(tmp_path / "work", say=said.append), ROWS)
    hub.fault = lambda _: None
    check(hub.download(tmp_path / "copy"), whole)
    assert {request.kind for request, _ in tries} >= {
        *("info", "tree", "paths-info", "resolve", "preupload"),
        *("lfs-batch", "lfs-put", "validate-yaml", "commit"),
    }
    seconds = "7200" if fault == 429 else "5"
    assert any(f"trying again, for at most {seconds} s" in line for line in said)
    shards = [commit.message for commit in hub.commits if commit.message.startswith("shard")]
    assert sorted(shards) == ["shard 0: 3 rows", "shard 1: 3 rows"]


def test_an_answer_that_does_not_come_is_not_waited_for(
    hub: HubServer, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try of a shard's commit is done long after we have gone on: too late to do any harm."""
    said: list[str] = []
    ledger = open_job(tmp_path / "work", say=said.append)
    monkeypatch.setattr(hub_storage, "REQUEST_TIMEOUT_S", 0.3)
    begun, done = threading.Event(), threading.Event()

    def hang(request: HubRequest) -> None:
        if request.kind == "commit" and not begun.is_set():
            begun.set()
            time.sleep(1.5)
            done.set()

    hub.fault = hang
    run_job(ledger, ROWS)
    assert any("timed out: trying again" in line for line in said)
    assert done.wait(timeout=5.0)
    time.sleep(0.2)  # until the late one has its answer
    check(hub.download(tmp_path / "copy"), whole)
    shards = [commit.message for commit in hub.commits if commit.message.startswith("shard")]
    assert sorted(shards) == ["shard 0: 3 rows", "shard 1: 3 rows"]


def test_a_rate_limit_is_waited_for_longer_than_an_outage(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any patience with outages, the limit is waited for, and the outage after it is the end."""
    monkeypatch.setattr(requests_again, "LONGEST_PAUSE_S", 0.02)
    hub.fault = lambda _: 429 if len(hub.requests) <= 20 else 503
    said: list[str] = []
    with pytest.raises(JobInterrupted, match="503"):
        open_job(tmp_path, say=said.append, give_up_after_s=0.0)
    assert len(hub.requests) == 21
    assert len(said) == 1
    assert "429" in said[0]


def test_an_outage_ends_the_job_in_good_order_and_nothing_is_lost(
    hub: HubServer, tmp_path: Path, whole: Path
) -> None:
    ledger = open_job(tmp_path / "work", give_up_after_s=0.3)
    hub.fault = lambda request: 503 if request.kind == "commit" else None
    drawn: list[tuple[int, int]] = []
    with pytest.raises(JobInterrupted, match=r"cannot be reached: .*503") as caught:
        run_job(ledger, ROWS, drawn=drawn)
    assert caught.value.exit_code == 75
    hub.fault = lambda _: None
    again: list[tuple[int, int]] = []
    run_job(open_job(tmp_path / "work"), ROWS, drawn=again)
    check(hub.download(tmp_path / "copy"), whole)
    assert not {*drawn[:6]} & {*again}, "images of the first shard are drawn again"


@pytest.mark.parametrize(
    ("url", "token", "fault", "message", "hint"),
    [
        (URL, "hf_writer", 401, "401", "HF_TOKEN (or `hf auth login`) must be a token that may write"),
        (URL, "hf_wrong", None, "401", "HF_TOKEN (or `hf auth login`) must be a token that may write"),
        (
            URL,
            "hf_writer",
            403,
            "403 Forbidden",
            "HF_TOKEN (or `hf auth login`) must be a token that may write",
        ),
        (f"{URL}x", "hf_writer", None, "404", "create it: hf repos create owner/namex --repo-type dataset"),
        (f"{URL}@dev", "hf_writer", None, "404", "hf repos branch create owner/name dev --repo-type dataset"),
    ],
    ids=["unknown", "wrong token", "read only", "no repo", "no branch"],
)
def test_what_is_refused_is_told_at_once_with_what_to_do(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    token: str,
    fault: int | None,
    message: str,
    hint: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fault = lambda request: fault if request.kind == "commit" or fault == 401 else None
    with pytest.raises(JobError, match=f"{url}.*: .*{message}") as caught:
        open_job(tmp_path, url)
    assert hint in (caught.value.hint or "")
    assert not hub.commits
    assert len(hub.requests) < 8, "at once"


def test_offline_mode_is_told_at_once(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(JobError, match="HF_HUB_OFFLINE"):
        open_job(tmp_path)


def test_a_repo_that_holds_something_else_is_left_alone(hub: HubServer, tmp_path: Path) -> None:
    hub.push({"thesis.pdf": b"dear"})
    with pytest.raises(JobError, match=r"is not empty and was not written by offdiff: it holds thesis\.pdf"):
        open_job(tmp_path)
    assert set(hub.files()) == {"thesis.pdf"}


def test_another_job_is_refused(hub: HubServer, tmp_path: Path) -> None:
    open_job(tmp_path / "a")
    with pytest.raises(JobMismatchError, match="num_rows: 6 -> 7"):
        open_job(tmp_path / "b", rows=7)


@pytest.mark.parametrize("how", ["missing", "cut short", "marker"])
def test_what_is_broken_is_made_again(hub: HubServer, tmp_path: Path, whole: Path, how: str) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    if how == "marker":
        hub.push({}, deleted=MARKERS[1:])
    elif how == "missing":
        hub.push({}, deleted=["images/shard-00001.parquet"])
    else:
        hub.push({"images/shard-00001.parquet": b"PAR1"})
    with open_to_read(URL) as ledger:
        reports = list(verify_shards(ledger, num_threads=1))
    assert [report.done and not report.problems for report in reports] == [True, False]
    ledger = open_job(tmp_path / "work")
    assert list(find_broken(ledger, ledger.shards)) == ([] if how == "marker" else [1])
    run_job(ledger, ROWS)
    check(hub.download(tmp_path / "copy"), whole)


def test_failures_are_retried_and_their_table_goes_by_the_same_commit(
    hub: HubServer, tmp_path: Path, whole: Path
) -> None:
    run_job(open_job(tmp_path / "work"), ROWS, failing={(0, 1): "nan"})
    assert "failures/shard-00000.parquet" in hub.files()
    drawn: list[tuple[int, int]] = []
    run_job(open_job(tmp_path / "elsewhere"), ROWS, retry_failed=True, drawn=drawn)
    assert drawn == [(0, 1)]
    check(hub.download(tmp_path / "copy"), whole)
    (again,) = (commit for commit in hub.commits if "_state/shards/shard-00000.r1.json" in commit.added)
    assert again.deleted == ("failures/shard-00000.parquet",)
    assert "failures/shard-00000.parquet" not in hub.files()


def test_surplus_that_is_gone_already_is_no_error(hub: HubServer, tmp_path: Path, whole: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS, failing={(0, 1): "nan"})
    hub.push({}, deleted=["failures/shard-00000.parquet"])
    run_job(open_job(tmp_path / "work"), ROWS, retry_failed=True)
    check(hub.download(tmp_path / "copy"), whole)


@pytest.mark.parametrize("name", ["shard-00000.json", "shard-00000.parquet"])
def test_what_the_repo_ignores_is_noticed(hub: HubServer, tmp_path: Path, name: str) -> None:
    ledger = open_job(tmp_path / "work")
    hub.ignored = frozenset({name})
    with pytest.raises(JobError, match=rf"a \.gitignore in the repo names \S+/{name}"):
        run_job(ledger, ROWS)
    assert set(hub.files()) == {"job.json"}


def test_files_that_are_gone_from_here_are_told_as_such(hub: HubServer, tmp_path: Path) -> None:
    """Whoever has published the shard meanwhile has taken them away: that is for the caller to find out."""
    with pytest.raises(FileNotFoundError):
        open_storage(URL).publish(
            {"images/a.parquet": tmp_path / "gone"}, surplus=(), marker=("m.json", b"{}"), message="shard 0"
        )
    assert not hub.commits


class Killed(BaseException):
    """What a process does after this no server ever sees."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_a_commit(
    hub: HubServer, tmp_path: Path, whole: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th commit is the last of a process; then another machine goes on, or this one."""
    commit_on, calls = hub_storage.HubStorage._commit_on, 0

    def dying(*arguments: Any) -> bool | None:
        nonlocal calls
        calls += 1
        if calls == last:
            if after:
                commit_on(*arguments)
            raise Killed
        return commit_on(*arguments)

    for last, elsewhere in itertools.product(range(1, 9), (False, True)):
        hub.reset()
        calls = 0
        name = f"{last} {elsewhere}"
        with monkeypatch.context() as patch:
            patch.setattr(hub_storage.HubStorage, "_commit_on", dying)
            try:
                run_job(open_job(tmp_path / name), ROWS)
                break
            except Killed:
                pass
        work = tmp_path / (f"{name} 2" if elsewhere else name)
        run_job(open_job(work), ROWS)
        check(hub.download(tmp_path / f"{name} copy"), whole)
        shards = [commit.message for commit in hub.commits if commit.message.startswith("shard")]
        assert sorted(shards) == ["shard 0: 3 rows", "shard 1: 3 rows"]
        assert not list((work / "_state" / "staged").iterdir())
    assert last >= 4


def test_workers_of_a_machine_share_claims_in_the_working_folder(hub: HubServer, tmp_path: Path) -> None:
    ledgers = [open_job(tmp_path / "work") for _ in range(2)]

    def queue_of(ledger: Ledger, worker: str) -> ShardQueue:
        claims = Claims(ledger.out, worker=worker, task=0, job_id=ledger.job.job_id, files=ledger.files)
        return ShardQueue(ledger, claims, todo={0: None, 1: None}, share=[0, 1], costs=[1.0, 1.0])

    queues = [queue_of(ledger, f"w{n}") for n, ledger in enumerate(ledgers)]
    taken = [queue.take() for queue in queues]
    assert [claimed.shard.index for claimed in taken if claimed] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "work" / "_state" / "claims").iterdir()) == [
        "shard-00000.000000.json",
        "shard-00001.000000.json",
    ]
    for queue in queues:
        queue.close()
    assert set(hub.files()) == {"job.json"}
    assert ledgers[0].remote is not None
    assert "one machine at a time" in (ledgers[0].remote.danger(2) or "")


def test_status_and_verify_read_the_hub_alone(hub: HubServer, tmp_path: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS, failing={(0, 0): "nan"})
    status = read_status(URL)
    assert (status.out, status.finished, status.num_ok, status.num_failed) == (URL, True, 9, 1)
    assert status.num_invalid_rows == 1
    with open_to_read(URL) as ledger:
        reports = list(verify_shards(ledger, num_threads=1))
        assert not list(ledger.out.glob("images/*")), "a shard's files go before the next one's come"
    assert [(report.num_rows, report.num_images, report.problems) for report in reports] == [
        (3, 5, []),
        (3, 4, []),
    ]


def test_a_marker_says_what_the_tables_are(hub: HubServer, tmp_path: Path) -> None:
    run_job(open_job(tmp_path / "work"), ROWS)
    files = hub.files()
    for path in MARKERS:
        for file in json.loads(files[path])["files"]:
            assert len(files[file["path"]]) == file["num_bytes"]


def test_nothing_there_is_told(hub: HubServer) -> None:
    with pytest.raises(JobError, match=f"{URL} is not an output of offdiff: it has no job.json"):
        read_status(URL)


def test_a_card_of_ones_own_is_left_alone(hub: HubServer, tmp_path: Path) -> None:
    ledger = open_job(tmp_path / "work")
    hub.push({"README.md": b"# Mine"})
    run_job(ledger, ROWS)
    assert hub.files()["README.md"] == b"# Mine"


@pytest.mark.parametrize(
    "url", ["hf://datasets/name", "hf://owner/name", "hf://spaces/owner/name", "hf://datasets/owner/name@"]
)
def test_other_places_of_the_hub_are_told(url: str) -> None:
    with pytest.raises(ConfigError, match="not a dataset repo on the Hub") as caught:
        open_storage(url)
    assert caught.value.hint == "hf://datasets/OWNER/NAME[@BRANCH][/FOLDER]"


def test_a_bucket_is_object_storage() -> None:
    assert isinstance(open_storage("hf://buckets/owner/name/job"), Storage)
