"""What a format is made of: the protocol, the registry, and parts that several formats share."""
