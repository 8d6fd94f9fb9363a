"""The commands of `jaxpar`: words to a call, the result to a screen."""
