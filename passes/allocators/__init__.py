"""Static memory allocation: offsets for buffers whose lifetimes are known, near the peak of live bytes."""

from forebay.passes.allocators.bounds import lower_bound
from forebay.passes.allocators.problem import Allocation, Buffer, check, read_csv, write_csv
from forebay.passes.allocators.select import allocate

__all__ = ["Allocation", "Buffer", "allocate", "check", "lower_bound", "read_csv", "write_csv"]
