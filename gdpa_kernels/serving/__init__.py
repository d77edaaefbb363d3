"""What is kept between requests, and when it may be used again."""
