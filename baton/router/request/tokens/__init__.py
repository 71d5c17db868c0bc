"""First tokens, kept tokens, and streams that another engine continues."""
