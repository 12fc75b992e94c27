// Command nomain never calls trainer.Main.
package main

func main() { println("nothing to do") }
