#!/usr/bin/env bash
# Installs what tests/slurm needs: Slurm's daemons and commands, and munge. Needs root and apt-get.
# Nothing is started: the tests start a cluster of their own, under other names and ports.
set -euo pipefail

for program in slurmctld slurmd sbatch munged; do
    PATH="$PATH:/usr/sbin" command -v "$program" > /dev/null || missing=1
done
if [ -z "${missing:-}" ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "tests/slurm: Slurm is not installed, and installing it needs root and apt-get" >&2
    exit 1
fi
# No daemon of the packages may start here, wherever something would start it.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
apt-get install --yes --quiet=2 --no-install-recommends slurmctld slurmd slurm-client munge > /dev/null
