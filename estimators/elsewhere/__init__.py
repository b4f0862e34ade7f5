"""A recorded iteration at another batch size or on another device."""
