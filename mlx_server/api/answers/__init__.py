"""From a request of any protocol to its answer."""
