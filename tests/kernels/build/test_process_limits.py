"""The limits of control groups, read from made-up trees as containers of both versions show them."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path

import pytest

from forebay.commands import cli
from forebay.kernels.build import process_limits
from forebay.kernels.build.process_limits import available_nbytes, core_count, memory_limit_nbytes
from forebay.runtime.devices.cpu import device as cpu_device

GIB = 1 << 30
HOST_NBYTES = 64 * GIB
NONE_V1 = str((1 << 63) - 4096)  # as version 1 writes that there is no limit


class Tree:
    """A made-up /proc and mounts of control groups."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mounts, self.groups = folder, list[str](), list[str]()
        (folder / "proc/self").mkdir(parents=True)
        (folder / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {HOST_NBYTES // 1024} kB\n")
        self._write()

    def mount(self, version: int, controller: str, root: str = "/", at: str = "") -> Path:
        """Mount the hierarchy of a version at a folder, which is returned."""
        place = self.folder / (at or f"cgroup{version}-{controller}")
        place.mkdir()
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", f"rw,{controller}")
        name = str(place).replace(" ", "\\040")
        self.mounts.append(f"30 23 0:29 {root} {name} rw,relatime shared:9 - {kind} cgroup {options}")
        self._write()
        return place

    def within(self, line: str) -> None:
        """Say in which group the process is."""
        self.groups.append(line)
        self._write()

    def _write(self) -> None:
        (self.folder / "proc/self/cgroup").write_text("\n".join(self.groups) + "\n")
        (self.folder / "proc/self/mountinfo").write_text("\n".join(("22 1 8:1 / / rw - ext4 d rw", *self.mounts, "")))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(process_limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return Tree(tmp_path)


def group(folder: Path, **files: object) -> Path:
    """Write the files of a group; `memory_max` is memory.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")
    return folder


def test_without_groups_the_machine_counts(tree: Tree) -> None:
    assert (core_count(), available_nbytes(), memory_limit_nbytes()) == (16, HOST_NBYTES, None)


@pytest.mark.parametrize("file", ["proc/self/cgroup", "proc/self/mountinfo"])
def test_missing_and_torn_files_of_the_kernel_limit_nothing(tree: Tree, file: str) -> None:
    group(tree.mount(2, "all"), memory_max=GIB)
    tree.within("0::/")
    assert memory_limit_nbytes() == GIB
    for content in (b"", b"\xff\xfe", b"0:\n1 - cgroup2\n:::::\n"):
        (tree.folder / file).write_bytes(content)
        assert (core_count(), available_nbytes(), memory_limit_nbytes()) == (16, HOST_NBYTES, None)
    (tree.folder / file).unlink()
    assert (core_count(), available_nbytes(), memory_limit_nbytes()) == (16, HOST_NBYTES, None)


def test_version_2_in_a_container_of_its_own_name_space(tree: Tree) -> None:
    group(tree.mount(2, "all"), memory_max=2 * GIB, memory_current=GIB,
          memory_stat=f"anon 7\nfile {GIB}\nactive_file {GIB // 4}\ninactive_file {GIB // 2}\nshmem 5",
          cpu_max="150000 100000")
    tree.within("0::/")
    assert (core_count(), memory_limit_nbytes()) == (2, 2 * GIB)
    assert available_nbytes() == 2 * GIB - GIB // 4, "pages of files are given back before the group is full"


def test_version_2_told_the_path_on_the_host(tree: Tree) -> None:
    group(tree.mount(2, "all", root="/docker/one"), memory_max=GIB, cpu_max="100000 100000")
    tree.within("0::/docker/one")
    assert (core_count(), available_nbytes(), memory_limit_nbytes()) == (1, GIB, GIB)


@pytest.mark.parametrize("path", ["/elsewhere", "/../..", "/../other"])
def test_a_group_outside_of_the_mount_is_that_at_the_mount(tree: Tree, path: str) -> None:
    group(tree.mount(2, "all", root="/docker/one"), memory_max=GIB)
    group(tree.folder / "other", memory_max=1)
    tree.within(f"0::{path}")
    assert memory_limit_nbytes() == GIB


@pytest.mark.parametrize("inner", ["max", 8 * GIB])
@pytest.mark.parametrize("outer", [4 * GIB, 16 * GIB])
def test_the_smallest_of_nested_groups_counts(tree: Tree, inner: str | int, outer: int) -> None:
    mount = tree.mount(2, "all", at="with a space")
    group(mount / "slice", memory_max=outer, memory_current=GIB, cpu_max="max 100000")
    group(mount / "slice/job", memory_max=inner, memory_current=GIB // 2, cpu_max="400000 100000")
    tree.within("0::/slice/job")
    limits = {outer: outer - GIB} | ({} if inner == "max" else {int(inner): int(inner) - GIB // 2})
    assert (core_count(), memory_limit_nbytes()) == (4, min(limits))
    assert available_nbytes() == min(limits.values())


def test_memory_that_slows_a_group_down_is_a_limit(tree: Tree) -> None:
    group(tree.mount(2, "all"), memory_max=2 * GIB, memory_high=GIB)
    tree.within("0::/")
    assert memory_limit_nbytes() == GIB


@pytest.mark.parametrize("root", ["/", "/docker/one"])
def test_version_1(tree: Tree, root: str) -> None:
    path = "docker/one" if root == "/" else ""
    group(tree.mount(1, "memory", root) / path, memory_limit_in_bytes=3 * GIB, memory_usage_in_bytes=GIB,
          memory_stat=f"total_active_file {GIB // 2}\ntotal_inactive_file 0\nactive_file 99")
    group(tree.mount(1, "cpu,cpuacct", root) / path, cpu_cfs_quota_us=250000, cpu_cfs_period_us=100000)
    for line in ("4:memory:/docker/one", "3:cpu,cpuacct:/docker/one", "2:name=systemd:/docker/one", "0::/"):
        tree.within(line)
    assert (core_count(), memory_limit_nbytes(), available_nbytes()) == (3, 3 * GIB, 3 * GIB - GIB // 2)


def test_version_1_without_limits(tree: Tree) -> None:
    group(tree.mount(1, "memory"), memory_limit_in_bytes=NONE_V1, memory_usage_in_bytes=GIB)
    group(tree.mount(1, "cpu"), cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    tree.within("4:memory:/")
    tree.within("3:cpu:/")
    assert (core_count(), available_nbytes(), memory_limit_nbytes()) == (16, HOST_NBYTES, None)


@pytest.mark.parametrize("value", ["", "-1", "0 0", "100000", "100000 0", "words and more", "1e9 5", "max"])
def test_a_share_of_cores_that_cannot_be_read_is_ignored(tree: Tree, value: str) -> None:
    group(tree.mount(2, "all"), cpu_max=value)
    tree.within("0::/")
    assert core_count() == 16


@pytest.mark.parametrize("value", ["", "-1", "lots", "1e9", "max"])
def test_a_memory_limit_that_cannot_be_read_is_ignored(tree: Tree, value: str) -> None:
    folder = group(tree.mount(2, "all"), memory_max=value, memory_current="junk", memory_stat="odd")
    tree.within("0::/")
    assert (available_nbytes(), memory_limit_nbytes()) == (HOST_NBYTES, None)
    (folder / "memory.max").unlink()
    (folder / "memory.max").mkdir()
    assert memory_limit_nbytes() is None


def test_more_in_use_than_the_limit_leaves_nothing_and_a_sliver_of_a_core_is_one(tree: Tree) -> None:
    group(tree.mount(2, "all"), memory_max=GIB, memory_current=2 * GIB, cpu_max="1000 100000")
    tree.within("0::/")
    assert (core_count(), available_nbytes()) == (1, 0)


def test_the_machine_counts_where_it_has_less_than_the_group(tree: Tree) -> None:
    group(tree.mount(2, "all"), memory_max=2 * HOST_NBYTES, cpu_max="9900000 100000")
    tree.within("0::/")
    assert (core_count(), available_nbytes()) == (16, HOST_NBYTES)


def test_the_command_computes_in_as_many_threads_as_cores_may_be_used(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("gc.set_threshold", lambda *counts: None)
    monkeypatch.setattr("forebay.commands.app.main", lambda: asked.append(os.environ.get("OMP_NUM_THREADS")))
    for name in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # so that it is as before afterwards
    monkeypatch.delenv("OMP_NUM_THREADS")
    ended = partial(pytest.raises, SystemExit, match="^0$")
    with ended():
        cli.main()
    group(tree.mount(2, "all"), cpu_max="300000 100000")
    tree.within("0::/")
    with ended():
        cli.main()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with ended():
        cli.main()
    assert asked == [None, "3", "7"], "what the user says counts"


def test_more_threads_than_a_container_has_cores_are_warned_of(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setattr("torch.get_num_threads", lambda: 16)
    group(tree.mount(2, "all"), cpu_max="max 100000")
    tree.within("0::/")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_device._warn_of_threads()
    group(tree.folder / "cgroup2-all", cpu_max="300000 100000")
    with pytest.warns(RuntimeWarning, match="16 threads, but this container may use 3 cores"):
        cpu_device._warn_of_threads()
