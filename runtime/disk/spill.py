"""Spill files: bytes of a run that fit no faster tier, in files without a name that end with the process.

Readers open such a file by its descriptor's path. Where that does not open (no /proc, or a sandbox's), the file keeps a
name until it is closed or the process ends; one that a killed process left is removed when the next such file is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forebay.runtime.disk.reader import DiskWriter, open_writer
from forebay.runtime.disk.spill_file import SpillError, SpillFile, spill_refusal


class SpillSpace:
    """The spill files of one device, all in `folder`, and their writer, which is started with the first of them."""

    def __init__(self, folder: str, method: str = "auto", depth: int | None = None, chunk_nbytes: int | None = None
                 ) -> None:
        self.folder = folder
        self._options = (method, depth, chunk_nbytes)
        self._files: dict[str, SpillFile] = {}
        self._writer: DiskWriter | None = None

    def open(self, files: Mapping[str, int]) -> None:
        """Take the files that are not there yet (nbytes by name). Programs share a file by its name; SpillError where
        they mean different sizes, or where the disk has no room."""
        for name, nbytes in files.items():
            there = self._files.get(name)
            if there is None:
                try:
                    Path(self.folder).mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise spill_refusal(self.folder, error) from error
                self._files[name] = SpillFile(name, self.folder, nbytes)
            elif there.nbytes != nbytes:
                raise SpillError(f"the spill file {name} has {there.nbytes} bytes, and a program means {nbytes}: plan "
                                 "the programs of one run together")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> SpillFile:
        return self._files[name]

    @property
    def writer(self) -> DiskWriter:
        """The engine that writes to the files."""
        if self._writer is None:
            self._writer = open_writer(*self._options)
        return self._writer

    def fault(self) -> BaseException | None:
        """The error that ended the writing engine; None while it lives, or before there is one."""
        return None if self._writer is None else self._writer.fault()

    def close(self) -> None:
        """End the writes and give the files' space back, which no reader may have open any more."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for file in self._files.values():
            file.close()
        self._files.clear()
