"""A priced program played out: what runs when, and what waits."""
