"""Judges one program, in processes of its own; `program_match` starts it with `python -I -S`, and says over stdin what is asked.

::

    trainer ── supervisor ─┬─ program   runs what the model wrote: no files, no sockets, no other processes
                           └─ judge     runs the tests, which ask the program over a pipe; values cross as JSON

    program, judge   what the two processes do
    peer             the conversation: `sharing` keeps containers equal, `standins` stand for classes and objects,
                     `values` are data as JSON
    names, reached   what names of the tests mean; which assertions a program may not keep them from
    supervisor       starts both; `confine` and `calls` take from them what they do not need

The program and the judge are forked from the supervisor before it has read the tests: what they expect is in the judge's memory alone.
Where the tests are inputs and outputs there is no judge: the supervisor compares what the program has written.
Nothing here imports anything but the standard library and this package, whose name is `judging` there.
"""
