"""The inside of a device's transfer process (``python -m kvgate.transfer.process``): all of the gateway that works with torch."""
