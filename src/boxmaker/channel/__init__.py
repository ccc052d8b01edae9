"""The channel protocol on a unix socket: loopd's half and the client's half."""
