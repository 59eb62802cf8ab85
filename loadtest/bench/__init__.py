"""The bench: identical load on several servers in turn, and what each request costs every process of each of them."""
