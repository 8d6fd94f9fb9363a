"""Closed forms of a step held against measurements: published iteration times of many plans of one
model on one cluster, ranked by `jaxpar.plan.closed_form`.

Its rooms, in the order in which they are read: `rows` reads the measured plans, `megatron`
describes the trainer that they ran with, and `ranking` puts predictions beside them.
"""
