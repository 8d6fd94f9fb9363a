"""Closed forms of a step held against what is known of plans, ranked by `jaxpar.plan.closed_form`.

Its rooms, in the order in which they are read: `order` has the rank correlations. Of published
iteration times of many plans of one model on one cluster, `rows` reads them, `megatron` describes
the trainer that they ran with, and `ranking` puts predictions beside them. Of rehearsals, `pairs`
draws plans of the planner's own space, `rehearsed` reads and writes the rows of what was rehearsed,
`rehearse_pairs` makes them anew, and `against_rehearsals` puts predictions beside them.
"""
