"""Who is there: records, and the view every decision is made from."""
