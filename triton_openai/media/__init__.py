"""Images of requests: taken out of data URLs, or fetched from hosts that the operator allows."""
