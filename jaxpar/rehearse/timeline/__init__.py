"""This package plays a priced program out: it finds what runs when, and what waits."""
