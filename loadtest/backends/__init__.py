"""Bare against served: what the backends' own libraries need for a row, and what `charonia serve` needs for it.

Begin at `subjects`, the table of what is measured. May import `loadtest.bench`, nothing of the product.
"""
