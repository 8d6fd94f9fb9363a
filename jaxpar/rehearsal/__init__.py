"""A rehearsal as data (`jaxpar rehearse --json`), and how it is shown: tables, differences, the page."""
