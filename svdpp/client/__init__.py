"""Client of `svdpp serve`: the clips of a jobs file, made by a server."""
