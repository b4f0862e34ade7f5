"""The judge of profile plans: (trace, decisions, device) -> Timeline. Every predicted number comes from here."""
