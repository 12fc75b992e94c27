package lab

import (
	"fmt"
	"math"
	"slices"
)

// Best returns the greatest of x.
func Best(x []float64) float64 { return slices.Max(x) }

// Median returns the median of x.
func Median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// Quantile returns a value that so much of all are below.
func Quantile(all []float64, q float64) float64 {
	if len(all) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[int(q*float64(len(sorted)-1))]
}

// List prints figures in columns.
func List(x []float64) string {
	s := ""
	for _, v := range x {
		s += fmt.Sprintf(" %6.1f", v)
	}
	return s
}

// Fractions prints ratios.
func Fractions(x []float64) string {
	s := ""
	for _, v := range x {
		s += fmt.Sprintf(" %.3f", v)
	}
	return s
}

// Spread95 describes few figures.
func Spread95(x []float64) string {
	s := slices.Sorted(slices.Values(x))
	p95 := s[int(math.Ceil(0.95*float64(len(s))))-1]
	return fmt.Sprintf("median %.2f, p95 %.2f, max %.2f ms", Median(s), p95, s[len(s)-1])
}

// Spread describes latencies.
func Spread(x []float64) string {
	s := slices.Sorted(slices.Values(x))
	at := func(q float64) float64 { return s[min(len(s)-1, int(math.Ceil(q*float64(len(s))))-1)] }
	sum := 0.0
	for _, v := range s {
		sum += v
	}
	return fmt.Sprintf("median %.3f, mean %.3f, p90 %.3f, p99 %.3f, max %.3f", at(0.5), sum/float64(len(s)), at(0.9), at(0.99), s[len(s)-1])
}

// Sum returns the sum of x.
func Sum(x []float64) (s float64) {
	for _, v := range x {
		s += v
	}
	return s
}
