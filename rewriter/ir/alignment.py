"""Alignment of memory and files."""

PAGE_NBYTES = 4096  # direct reads want offset, length and address aligned to the disk's logical block: 512 or 4096
# A further read of a lookup took 30 to 50 us on two cores; 32 KiB more in one take 8 at 4 GB/s, and 40 at 0.8.
ROW_GAP_NBYTES = 32 << 10  # between rows that are looked up, at most, to come in one read
ROW_READ_NBYTES = 256 << 10  # of such a read, at most: it passes through memory that no plan counts
# Small pieces of a file that lie no farther apart come in one read: copying 64 KiB takes 5 us, a request 50.
GATHER_NBYTES = 64 << 10
ALIGNMENT = 64  # bytes: one cache line, and the widest vector load


def aligned(nbytes: int) -> int:
    """Bytes up to the next address where a buffer may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slot_stride(nbytes: int) -> int:
    """Arena bytes of a slot: its contents may begin anywhere in a page, as they do in the file."""
    return whole_pages(nbytes + PAGE_NBYTES - 1)


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that so many bytes fill, from the beginning of one."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
