"""Tables and pictures: a plan's parameters, its pipeline's schedule, what is kept; the timeline of
a rehearsal.

Its rooms, in the order in which they are read. Of a plan: `shards` draws arrays on a mesh, `layer`
one layer, `ring` a split sequence, `masks` what attention sees, `schedule` a pipeline and
`memory_bars` what fills a memory; `tables` has the same in words, `figures` writes pictures to
files, and `show` is the command that puts them together. Of a rehearsal: `timeline`,
`memory_timeline`, `task_graph`, and for many of them `compositions` and `foresight`, and `plans`
for those of a search; of estimates beside measured plans `measured_plans`, and beside rehearsed
ones `rehearsed_plans`. Of a run: `losses`, `watch`, `profile` and `goodput`, and of several
`compare`.
"""
