"""The region from the last hidden state to the loss, and back, as a loop over chunks of rows."""
