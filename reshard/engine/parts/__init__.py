"""Many processes for one conversion: each converts bands of the plan (plans/bands.py), and the last one completes the target.

    join     a share of the target's lock; the first process prepares the files and the journal
    copy     the blocks of its bands that no process has converted yet; each process notes them in a journal of its own
    leave    the share is given up
    complete if the journals list all blocks: take the whole lock and give the files their final names (run.py, as a run that resumes)

Processes do not talk to each other. A block that is converted twice gets the same bytes twice.
"""
