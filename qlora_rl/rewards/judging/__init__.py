"""Judges one program, in processes of its own; `program_match` starts it with `python -I -S`, and says over stdin what
is asked.

::

    trainer ── supervisor ─┬─ program   runs what the model wrote: no files, no sockets, no other processes
                           └─ judge     runs the tests, which ask the program over a pipe; data crosses as JSON

    modes        whether tests compare values, which is judged so, or need the program's objects
    judge        tests that compare values; `program` answers them, `wire` is what crosses
    inside       tests that need the program's objects, in the program's process
    names        what names of the tests mean
    supervisor   starts the processes; `confine` and `calls` take from them what they do not need

The program and the judge are forked from the supervisor before it has read the tests: what they expect is in the
judge's memory alone. Where the tests are inputs and outputs there is no judge: the supervisor compares what the program
has written. Nothing here imports anything but the standard library and this package, whose name is `judging` there.
"""
