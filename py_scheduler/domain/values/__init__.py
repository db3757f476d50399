"""Small values and rules that everything else is made of."""
