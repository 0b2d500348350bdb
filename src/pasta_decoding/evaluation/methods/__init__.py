"""The methods that are compared, one interface and one engine for all of them."""
