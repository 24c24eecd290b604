"""What memory and files are cut along."""

PAGE_NBYTES = 4096  # direct reads want offset, length and address aligned to the disk's logical block: 512 or 4096
ALIGNMENT = 64  # bytes: one cache line, and the widest vector load


def aligned(nbytes: int) -> int:
    """Bytes up to the next address where a buffer may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that so many bytes fill, from the beginning of one."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
