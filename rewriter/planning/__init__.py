"""Make, check and advise on plans."""
