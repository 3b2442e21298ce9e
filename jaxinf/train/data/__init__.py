"""Data for the trainer: files to examples to rows to batches.

    files ─► records ─► examples ─► ids ─► rows ─► batches
    images ──────────────────────────────► rows ─► batches

Invariant: everything is a pure function of the files' content, the options, the seed
and the number of the batch; resuming needs that number only. Unusable data raises a
`DataError` with its place, what was expected, and the remedy.
"""
