"""Child processes: channels to them, and how their death or silence is noticed."""
