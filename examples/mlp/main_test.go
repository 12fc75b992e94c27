package main

import (
	"math"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

func TestDirection(t *testing.T) {
	for a := 0.0; a < 12; a += 0.1 {
		if x, y := direction(a); math.Abs(x-math.Cos(a)) > 1e-4 || math.Abs(y-math.Sin(a)) > 1e-4 {
			t.Errorf("direction(%v) = %v, %v, want %v, %v", a, x, y, math.Cos(a), math.Sin(a))
		}
	}
}

func TestSpiralsAreFixed(t *testing.T) {
	s := spirals{n: 300, arms: 3, seed: 1}
	classes := make([]int, 3)
	for i := range s.n {
		var in [2]trainer.Tensor
		var class [2]int32
		for k := range in {
			target := trainer.NewTensor(trainer.Int32, 1)
			in[k] = trainer.NewTensor(trainer.Float32, 2)
			if err := s.Sample(trainer.Sample{Index: i}, in[k], target); err != nil {
				t.Fatal(err)
			}
			class[k] = target.I[0]
		}
		if in[0].F[0] != in[1].F[0] || in[0].F[1] != in[1].F[1] || class[0] != class[1] {
			t.Fatalf("sample %d differs the second time", i)
		}
		classes[class[0]]++
	}
	for k, n := range classes {
		if n < 70 {
			t.Errorf("class %d has %d of 300 points", k, n)
		}
	}
}
