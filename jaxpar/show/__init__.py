"""Tables and pictures: a plan's parameters, its pipeline's schedule, what is kept; the timeline of
a rehearsal.
"""
