"""The control protocol between gateway and its clients: versions, framing, messages. No sockets here."""
