"""What was spent: accountants, ledger, planning, audit, and the check of repeated releases."""
