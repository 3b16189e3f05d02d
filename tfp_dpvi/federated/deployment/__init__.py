"""The processes of a study over several machines: a Flower app, each hospital's worker, and the socket between them."""
