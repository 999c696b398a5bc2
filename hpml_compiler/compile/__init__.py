"""One graph of the backend, from Dynamo to what a rank runs."""
