"""What memory and files are cut along."""

PAGE_NBYTES = 4096  # direct reads want offset, length and address aligned to the disk's logical block: 512 or 4096
ALIGNMENT = 64  # bytes: one cache line, and the widest vector load
