"""The names of the arrays of a batch in which a teacher's answers are.

They are written where data are read, and read where the loss is: two wings that do not know each
other.
"""

TEACHER_IDS = "teacher_ids"
"""The entries of the vocabulary that a teacher finds most likely, int32 [B, S, k]."""
TEACHER_LOG_PROBS = "teacher_log_probs"
"""Their log-probabilities in the whole vocabulary, float32 [B, S, k]."""
TEACHER_HIDDEN = "teacher_hidden"
"""A teacher's hidden states after some of its layers, in the compute dtype [B, S, P, T]."""
