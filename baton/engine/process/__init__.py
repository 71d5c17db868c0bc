"""Child processes: channels to them, and detection of their death or hang."""
