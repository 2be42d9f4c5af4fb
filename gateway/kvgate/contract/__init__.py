"""Pure values of the kvgate contract: encoding, digests, descriptors, addresses. No I/O, no clock, no imports of ours outside."""
