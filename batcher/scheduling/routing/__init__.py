"""Which executor a request for text goes to. Pure. May import `queues` and what stands below it."""
