"""Moving rows of the batch between ranks while a model trains (`balance="auto"`)."""
