"""The trainers: thin over TRL, which only this package imports (and the demo, for comparison).

Next to them, subpackages that each import only those before it:

    ranks/      several processes: an engine for all of them, sharded models, ZeRO
    setup/      what the arguments mean: base and model, settings, memory, which of the two is loaded first
    run/        a run on disk: its directory, checkpoints, resuming, progress
    rollouts/   the engine, linked to the policy, and what it generates
    watch/      what is measured at every step, and the alarm
"""
