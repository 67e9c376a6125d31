"""What serving over HTTP withstands, and whether evaluation harnesses get the right scores."""
