"""Callbacks for trainers: `transformers.MemoptCallback`, `lightning.MemoptCallback`."""
