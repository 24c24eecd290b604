"""The memory and options of modules compiled with the backend `forebay`."""
