"""What `charonia simulate` predicts beside what a real server then does: record, ask, change, measure, compare.

__main__       the command line, the turns and the table
questioned     what a question changes of a configuration, of options and of arrivals; the models that are asked about
real_runs      a server under recorded or measured load, and `charonia simulate` as a program

How to read its figures: `docs/howto/simulate.md`.
"""
